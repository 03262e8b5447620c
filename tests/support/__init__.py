"""What tests of several folders build on: peers in this process, commands as processes, links between them."""
