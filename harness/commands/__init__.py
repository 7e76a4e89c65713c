"""The commands, by subject; importing a file adds its commands to the application."""
