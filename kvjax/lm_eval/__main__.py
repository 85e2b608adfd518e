"""lm_eval's own command line, with the model ``kvjax``; see docs/lm_eval.md.

python -m kvjax.lm_eval --model kvjax --model_args "path=kvjax-tiny,policy=h2o,budget=0.2" --tasks ...
"""

import importlib.util
import sys

from kvjax.errors import KvjaxError

USAGE_ERROR = 2
INSTALL = "pip install 'kvjax[lm-eval]'"


def main() -> int:
    """Registers the model and runs lm_eval. Errors of the user are one paragraph."""
    if importlib.util.find_spec("lm_eval") is None:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(f"{__doc__}\nOptions are lm_eval's, which is not installed: {INSTALL}")
            return 0
        print(f"error: this is lm_eval's command line, and lm_eval is not installed: {INSTALL}", file=sys.stderr)
        return USAGE_ERROR
    try:
        from lm_eval.__main__ import cli_evaluate

        from kvjax.lm_eval.model import KVJaxLM  # noqa: F401 (registers itself)

        cli_evaluate()
    except (KvjaxError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
