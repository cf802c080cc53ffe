"""What the programs share: command lines, files, tables, pictures, counts of compiled programs."""
