from tokenscale.cli import main

raise SystemExit(main())
