"""Load generator of `headrace bench`: client processes with prepared requests, statistics, pages, comparison of two runs."""
