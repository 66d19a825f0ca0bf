"""The absorption check by itself: decompressed against absorbed attention, each against float64.

python bench/absorption.py --keys 2048
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich.console import Console

from trtllm_mla.dtypes import DType
from trtllm_mla.validation.absorption import AbsorptionSizes, check_absorption
from trtllm_mla.validation.report import absorption_table


def main() -> int:
    """Prints a table for each type; returns 1 if an error is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=2048, help="cached tokens")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = replace(AbsorptionSizes(), keys=arguments.keys)
    results = [check_absorption(dtype, sizes, seed=arguments.seed) for dtype in (DType.FLOAT32, DType.BFLOAT16)]
    console = Console()
    for result in results:
        console.print(absorption_table(result))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
