"""`headrace demo`: the flights out of New York in 2013 through one silo, watched live and checked at the end."""
