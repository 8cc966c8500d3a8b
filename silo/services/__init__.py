"""The services of a silo: one module for each service of `proto/v1/*.proto`. They do not know how calls reach them."""
