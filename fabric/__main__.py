"""``python -m fabric``: the command, whatever else has taken its name on the PATH."""

from fabric.cli.main import main

if __name__ == "__main__":
    main()
