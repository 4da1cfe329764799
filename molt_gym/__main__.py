"""`python -m molt_gym` is `molt-gym`."""

from .cli import main

raise SystemExit(main())
