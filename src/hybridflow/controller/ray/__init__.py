"""Workers in processes of their own, on this machine and others, through Ray: the only room that imports it."""
