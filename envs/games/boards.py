"""Tic-tac-toe and Connect Four: two seats, X moves first, reward 1 for a win, -1 for a loss and 0 for a draw."""

from collections.abc import Mapping
from functools import cache
from itertools import chain

import numpy as np
from gymnasium.spaces import Discrete

from molt_gym.adapters.action_text import parse_action
from molt_gym.messages import Message, text_of
from molt_gym.multi_agent import GameEnv, IllegalMove

from .demonstrations import demonstrations

__all__ = ["ConnectFour", "TicTacToe"]

@cache
def lines(rows: int, columns: int, length: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each cell, numbered along the rows from 0 on, the lines of `length` neighbouring cells that it is in."""
    found = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        for row in range(rows - (length - 1) * down):
            for column in range(columns):
                if 0 <= column + (length - 1) * right < columns:
                    found.append(tuple((row + k * down) * columns + column + k * right for k in range(length)))
    return tuple(tuple(line for line in found if cell in line) for cell in range(rows * columns))


class BoardGame(GameEnv):
    """What the two have in common: a board as a string of X, O and dots, and moves numbered from 1 on."""

    seats = ("X", "O")
    presets = {"": GameEnv.presets[""] | {"rollout": {"max_tokens": 256}}, "tiny": {"rollout": {"max_tokens": 8}}}
    rows = columns = length = 0

    def begin(self, index: int) -> None:
        """An empty board."""
        self.board, self._winner = "." * (self.rows * self.columns), ""

    def turn(self) -> str | None:
        """X and O by turns, until one has won or the board is full."""
        free = self.board.count(".")
        return None if self._winner or not free else self.seats[(len(self.board) - free) % 2]

    def move(self, seat: str, message: Message) -> Mapping[str, float]:
        """Sets a mark.

        Raises:
            IllegalMove: the reply's last line is not the number of a free place.
        """
        legal = self.legal()
        try:
            chosen = int(parse_action(text_of(message), Discrete(max(self.numbers()), start=1)))
        except ValueError as error:
            raise IllegalMove(str(error)) from error
        if chosen not in legal:
            raise IllegalMove(f"{chosen} is taken; write one of {', '.join(map(str, legal))}")
        wins = self.wins(self.cell(chosen), seat)
        self.board = put(self.board, self.cell(chosen), seat)
        if not wins:
            return {}
        self._winner = seat
        return {each: 1.0 if each == seat else -1.0 for each in self.seats}

    def legal(self) -> list[int]:
        """The numbers that may be played."""
        return [number for number in self.numbers() if self.board[self.cell(number)] == "."]

    def wins(self, cell: int, mark: str) -> bool:
        """Whether a mark on a cell would make a full line."""
        return won(put(self.board, cell, mark), mark, lines(self.rows, self.columns, self.length)[cell])

    def numbers(self) -> range:
        """All numbers of moves."""
        raise NotImplementedError

    def cell(self, number: int) -> int:
        """The cell, counted along the rows from 0 on, on which the move of a number puts a mark."""
        raise NotImplementedError

    def random_move(self, seat: str, rng: np.random.Generator) -> str:
        """Any legal number."""
        legal = self.legal()
        return str(legal[rng.integers(len(legal))])

    def good_move(self, seat: str, rng: np.random.Generator) -> str:
        """A number that wins at once, or else keeps the other from that, if there is one; otherwise any."""
        for mark in (seat, *(other for other in self.seats if other != seat)):
            for number in self.legal():
                if self.wins(self.cell(number), mark):
                    return str(number)
        return self.random_move(seat, rng)

    demonstrations = demonstrations


class TicTacToe(BoardGame):
    """Tic-tac-toe: two seats, three in a row win.

    A reply is the number of a free cell, from 1 to 9; arguments are those of `molt_gym.GameEnv`.
    """

    rows = columns = length = 3

    def rules(self, seat: str) -> str:
        """What to do, in a few words."""
        return (f"You play {seat} in tic-tac-toe. Three in a row, column or diagonal win. Lines that only one has "
                "marks in are listed: the marks, then the free cells. Reply with the number of a free cell.")

    def view(self, seat: str) -> str:
        """The board, on which free cells have their numbers, and the lines in which one has marks and can still win."""
        cells = [str(place + 1) if mark == "." else mark for place, mark in enumerate(self.board)]
        board = "\n".join(" ".join(cells[row * 3 : row * 3 + 3]) for row in range(3))
        marks = [sorted((cells[cell] for cell in line), key=lambda cell: (cell.isdigit(), cell))
                 for line in dict.fromkeys(chain(*lines(3, 3, 3)))]
        opened = ["".join(line) for line in marks if len(set(line) & set(self.seats)) == 1 and line[-1].isdigit()]
        return f"{board}\nlines: {' '.join(opened)}" if opened else board

    def numbers(self) -> range:
        """Of the cells."""
        return range(1, 10)

    def cell(self, number: int) -> int:
        """The cell itself."""
        return number - 1

    def good_move(self, seat: str, rng: np.random.Generator) -> str:
        """One that never loses."""
        scores = {number: _value(put(self.board, number - 1, seat), number - 1, seat) for number in self.legal()}
        best = [number for number, score in scores.items() if score == max(scores.values())]
        return str(best[rng.integers(len(best))])


class ConnectFour(BoardGame):
    """Connect Four: two seats, four in a row win on a board of 6 x 7, where marks fall to the lowest free place.

    A reply is the number of a column that is not full, from 1 to 7; arguments are those of `molt_gym.GameEnv`.
    """

    rows, columns, length = 6, 7, 4

    def rules(self, seat: str) -> str:
        """What to do, in a few words."""
        return (f"You play {seat} in Connect Four. A mark falls to the lowest free place of its column; four in a row, "
                "column or diagonal win. Reply with the number of a column that is not full, from 1 to 7.")

    def view(self, seat: str) -> str:
        """The board under the numbers of its columns."""
        rows = [self.board[row * 7 : row * 7 + 7] for row in range(6)]
        return "\n".join(" ".join(row) for row in ("1234567", *rows))

    def numbers(self) -> range:
        """Of the columns."""
        return range(1, 8)

    def cell(self, number: int) -> int:
        """The lowest free cell of the column, or its highest one if it is full."""
        return max((row * 7 + number - 1 for row in range(6) if self.board[row * 7 + number - 1] == "."),
                   default=number - 1)


def put(board: str, cell: int, mark: str) -> str:
    """The board with a mark on a cell."""
    return board[:cell] + mark + board[cell + 1 :]


def won(board: str, mark: str, among: tuple[tuple[int, ...], ...]) -> bool:
    """Whether one of the lines is full of a mark."""
    return any(all(board[cell] == mark for cell in line) for line in among)


@cache
def _value(board: str, cell: int, mark: str) -> int:
    """Of tic-tac-toe, for the seat of `mark` as it has just put that on `cell`: 1 if it can win, -1 if it must lose."""
    if won(board, mark, lines(3, 3, 3)[cell]):
        return 1
    other = "O" if mark == "X" else "X"
    return -max((_value(put(board, free, other), free, other) for free in range(9) if board[free] == "."), default=0)
