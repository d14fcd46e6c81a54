"""What is wrong with a configuration, file by file as the schema has it; `root.check` asks all of them."""
