"""Where `hotset` starts: Ctrl-C ends it in one line, during imports and at the very end too.

Imports nothing that takes time; the commands are `hotset.cli.main`.
"""

import signal
import sys


def main() -> None:
    """Runs the command line and exits, see `hotset.cli.main.main`."""
    try:
        from hotset.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)  # what a shell gives for SIGINT
    finally:
        # All is said; whoever is impatient with what is left to clean up ends it at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
