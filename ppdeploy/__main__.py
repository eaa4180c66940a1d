"""`python -m ppdeploy` is the `ppdeploy` command."""

from ppdeploy.cli import main

if __name__ == "__main__":
    main()
