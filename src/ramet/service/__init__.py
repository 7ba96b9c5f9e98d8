"""An engine that is elsewhere: in a process of its own, or in a thread. What goes between is msgspec over zmq."""
