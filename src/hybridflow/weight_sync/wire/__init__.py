"""How weights go to engines of other processes: channel, transports, sender, receiver."""
