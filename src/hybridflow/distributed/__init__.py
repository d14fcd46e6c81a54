"""Devices, process groups, meshes and collectives."""
