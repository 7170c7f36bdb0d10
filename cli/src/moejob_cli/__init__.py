"""The command line: commands, and the text and tables they print; never imports torch or the operator."""
