"""What the swarm looks like to somebody who only reads the DHT: one snapshot, the terminal, a web page."""
