"""Writes the generated tables of docs/storages.md: bytes of a slot, and which storage goes with what.

python -m experiments.storage_tables

Both are read from the code, on shapes alone: nothing is run. A storage of the registry that needs arguments, or more
than one row, has them in `experiments.programs.storage_tables`.
"""

import argparse


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # It imports jax, which `--help` does without.
    from experiments.programs.storage_tables import PAGE, regenerated

    PAGE.write_text(regenerated(PAGE.read_text()))
    print(f"Wrote the tables of {PAGE}")


if __name__ == "__main__":
    main()
