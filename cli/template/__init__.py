"""The files of a new project, which `headrace init` copies. Each has the ending .txt in addition."""
