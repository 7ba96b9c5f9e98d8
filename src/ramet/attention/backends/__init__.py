"""Ways to do attention, behind one interface (``base``); ``ramet.attention.registry`` chooses."""
