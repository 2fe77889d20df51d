"""``python -m variable_batch_size``: the command ``vbs``."""

from variable_batch_size.lab.command.main import main

if __name__ == "__main__":
    raise SystemExit(main())
