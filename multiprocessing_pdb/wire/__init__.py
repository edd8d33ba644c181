"""The protocol between ranks and consoles, and who may speak it: frames, handshake, peers, runtime directory."""
