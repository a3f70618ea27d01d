"""``python -m allranks`` is the command ``allranks``."""

from allranks.command.main import main

if __name__ == "__main__":
    main()
