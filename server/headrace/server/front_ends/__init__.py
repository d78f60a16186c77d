"""Front-end processes: sockets and protocols in several processes, one engine process with the models behind them."""
