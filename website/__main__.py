"""`python -m website DIR`: build the site below DIR. The HTML is in DIR/html."""

import sys
from pathlib import Path

from .building import build
from .errors import SiteError

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m website DIR")
    try:
        print(build(Path(sys.argv[1]).absolute()))
    except SiteError as error:
        sys.exit(f"website: {error}")
