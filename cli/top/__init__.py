"""The live screen of `headrace top`."""
