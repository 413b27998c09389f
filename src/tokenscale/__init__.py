"""tokenscale: a laboratory for LLM pretraining systems, from raw Parquet to a report one can defend."""

import sys

__version__ = "0.2.0"


class _OldNames:
    """Finder behind all others; imports what answers old module names when such a name is looked for."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None):
        """Delegate names of this package that no other finder knows."""
        if not name.startswith("tokenscale.") or name == "tokenscale.renamed_modules":
            return None
        from tokenscale import renamed_modules

        return renamed_modules.OldNames().find_spec(name)


sys.meta_path.append(_OldNames)
