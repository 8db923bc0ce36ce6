"""mosec: bytes in, bytes out. The command line contains mosec's own options, such as --port."""

from mosec import Server, Worker
from network import BATCH, WAIT_MS, decode, make, stacked


class Infer(Worker):
    def __init__(self):
        super().__init__()
        self.model = make()

    def deserialize(self, data):
        return decode(data)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        if BATCH == 1:
            return self.model(stacked([data]))[0]
        return list(self.model(stacked(data)))


if __name__ == "__main__":
    server = Server()
    server.append_worker(Infer, num=1, max_batch_size=BATCH, max_wait_time=WAIT_MS, timeout=60)
    server.run()
