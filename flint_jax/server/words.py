"""What the command is called in what it prints: ``serve.py``, or ``flint serve``."""

program = "serve.py"
