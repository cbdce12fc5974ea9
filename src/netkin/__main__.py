"""`python -m netkin` is the same as `netkin`."""

from netkin.cli import cli

if __name__ == "__main__":
    cli(prog_name="netkin")
