"""The protocol between ranks and consoles: frames, handshake, peer checks, runtime directory."""
