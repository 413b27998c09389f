"""XXH3, from the package xxhash. A trainer without it writes no stores, and checks those it reads whole, by SHA-256."""

try:
    from xxhash import xxh3_64_intdigest, xxh3_128
except ImportError:
    xxh3_64_intdigest = xxh3_128 = None
