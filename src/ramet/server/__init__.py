"""An OpenAI-compatible server that keeps n. :func:`ramet.server.app.make_app` makes it, ``ramet serve`` runs it."""
