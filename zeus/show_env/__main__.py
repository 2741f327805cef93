"""`python -m zeus.show_env`"""

import sys

from zeus.show_env import main

if __name__ == "__main__":
    sys.exit(main())
