"""Games with several seats: TicTacToe-v0, ConnectFour-v0 and Negotiation-v0."""

from .boards import ConnectFour, TicTacToe
from .negotiation import Negotiation

__all__ = ["ConnectFour", "Negotiation", "TicTacToe"]
