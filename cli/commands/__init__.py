"""The commands of `headrace`, one module each. They are imported when they are called."""
