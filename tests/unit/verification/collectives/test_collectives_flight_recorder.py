"""The flight file: a rank's last collectives, readable while the rank writes and after it died."""

from __future__ import annotations

import json
from pathlib import Path

from moeverify.verification.collectives.flight_recorder import NUM_SLOTS, FlightFile, read_flight


def write(flight: FlightFile, number: int, note: str = "") -> None:
    record = {"number": number, "op": "all_reduce", "group": [0], "group_name": "0", "sequence": number}
    flight.write(number, json.dumps({**record, "site": note}).encode())


def test_records_come_back_in_order_with_their_state(tmp_path: Path) -> None:
    flight = FlightFile(tmp_path / "flight")
    for number in (1, 2, 3):
        write(flight, number)
    flight.finish(1, success=True)
    flight.finish(2, success=False)
    assert [(record.number, record.state) for record in read_flight(tmp_path / "flight")] == [
        (1, "finished"),
        (2, "failed"),
        (3, "started"),
    ]


def test_the_oldest_give_way(tmp_path: Path) -> None:
    flight = FlightFile(tmp_path / "flight")
    for number in range(1, NUM_SLOTS + 3):
        write(flight, number)
    flight.finish(1, success=True)  # Its slot has another record by now.
    records = read_flight(tmp_path / "flight")
    assert [record.number for record in records] == list(range(3, NUM_SLOTS + 3))
    assert {record.state for record in records} == {"started"}


def test_a_record_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    flight = FlightFile(tmp_path / "flight")
    write(flight, 1)
    write(flight, 2, "x" * 2000)
    write(flight, 3)
    assert [record.number for record in read_flight(tmp_path / "flight")] == [1, 3]


def test_clear_and_no_file(tmp_path: Path) -> None:
    flight = FlightFile(tmp_path / "flight")
    write(flight, 1)
    flight.clear()
    assert read_flight(tmp_path / "flight") == []
    assert read_flight(tmp_path / "none") == []
