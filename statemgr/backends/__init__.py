"""State backends: a backup and a restore manager each, and the transfer engine. Floor 3: I/O by ports."""
