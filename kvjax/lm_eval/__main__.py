"""lm_eval's own command line, with the model ``kvjax``; see docs/lm_eval.md.

python -m kvjax.lm_eval --model kvjax --model_args "path=kvjax-tiny,policy=h2o,budget=0.2" --tasks ...
"""

import sys

from kvjax.errors import KvjaxError
from kvjax.lm_eval import help_text

USAGE_ERROR = 2
INSTALL = "pip install 'kvjax[lm-eval]'"


def main() -> int:
    """Registers the model and runs lm_eval. Errors of the user are one paragraph."""
    asks_for_help = bool({"-h", "--help"} & set(sys.argv[1:]))
    if asks_for_help:
        command = sys.argv[0] if sys.argv[0].startswith("kvjax ") else "python -m kvjax.lm_eval"
        about = str(__doc__).replace("python -m kvjax.lm_eval", command)
        print(f"{about}\n{help_text.arguments()}\n\nThe other options are those of lm_eval:\n", flush=True)
    try:
        from lm_eval.__main__ import cli_evaluate

        if not asks_for_help:  # the options are those of lm_eval, and it takes seconds
            from kvjax.lm_eval.model import KVJaxLM  # noqa: F401 (registers itself)
    except ImportError as error:
        if asks_for_help:
            print(f"lm_eval cannot be imported ({error}): {INSTALL}")
            return 0
        print(f"error: this is the command line of lm_eval, which needs {error.name}: {INSTALL}", file=sys.stderr)
        return USAGE_ERROR
    try:
        cli_evaluate()
    except (KvjaxError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
