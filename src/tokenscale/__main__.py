from tokenscale.cli.main import main

raise SystemExit(main())
