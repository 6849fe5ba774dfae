"""The page where a person simulates with what-ifs and plans: local, offline, for one person.

Needs the extra `web`. It listens on 127.0.0.1 alone, every address begins with a random token, and
it reads and writes no file outside its own folder but those named on the command line.
"""

from foretell.studio.serve import Running, serve

__all__ = ["Running", "serve"]
