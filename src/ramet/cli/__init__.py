"""The ``ramet`` command. Importing it loads neither torch nor a model."""
