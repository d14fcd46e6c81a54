"""Adapters of trainers by name; a module has one class, which `adapter.load_adapter` makes."""
