"""Readers: what real files look like, what broken ones are called, what is repaired."""

import json
import struct
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from schemas.errors import RecordError
from tasks.operations.doctor import OPEN3D
from tasks.threedos.formats import (
    OPEN3D_READERS,
    Mesh,
    is_watertight,
    read_shape,
    sample_file,
    surface_of,
)
from tasks.threedos.scans import (
    Scan,
    grid_surface,
    probe_h5,
    probe_npz,
    read_bin,
    read_grid_row,
    read_h5_row,
    read_points_text,
)
from tasks.threedos.text_meshes import fan, read_obj, read_off
from tasks.threedos.whole_files import check_whole
from tests.shared import need_libraries, shared_path

CUBE = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
CUBE_QUADS = np.array(
    [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
)
TETRAHEDRON = """OFF
4 4 6
0 0 0
1 0 0
0 1 0
0 0 1
3 0 2 1
3 0 1 3
3 0 3 2
3 1 2 3
"""
ITEM = {
    "part": "", "row": None, "sample_id": "a/b", "points": 32, "candidates": 64, "seed": 0,
    "farthest": "plain", "normalisation": "unit_sphere", "background": "keep",
}  # fmt: skip


def rule_of(reader, data) -> str:
    with pytest.raises(RecordError) as caught:
        reader(data)
    return caught.value.rule


def area_of(mesh: Mesh) -> float:
    return float(surface_of(mesh).areas.sum())


def plain_off(data: bytes) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Word by word, as the format's description reads."""
    words = iter(data.decode()[3:].split())
    vertices, faces, _ = (int(next(words)) for _ in range(3))
    points = np.array([[float(next(words)) for _ in range(3)] for _ in range(vertices)])
    triangles = []
    for _ in range(faces):
        assert next(words) == "3"
        triangles.append(tuple(int(next(words)) for _ in range(3)))
    return points, triangles


# ---------------------------------------------------------------- OFF


@pytest.mark.parametrize(
    "text",
    [
        TETRAHEDRON,
        TETRAHEDRON.replace("OFF\n", "OFF"),
        TETRAHEDRON.replace("OFF\n", "OFF "),
        TETRAHEDRON.replace("\n", "\r\n"),
        "# made by hand\n\n" + TETRAHEDRON.replace("4 4 6", "# counts\n4 4 6 # edges too"),
        TETRAHEDRON.replace("3 0 2 1", "3 0 2 1 255 0 0"),
        TETRAHEDRON.replace("OFF", "COFF").replace("0 0 1\n", "0 0 1 9 9 9\n")
        .replace("0 0 0\n", "0 0 0 9 9 9\n").replace("1 0 0\n", "1 0 0 9 9 9\n")
        .replace("\n0 1 0\n", "\n0 1 0 9 9 9\n"),
        TETRAHEDRON.replace("4 4 6", "4 4"),
    ],
    ids=["plain", "glued", "one line", "windows", "comments", "face colour", "colours", "no edges"],
)  # fmt: skip
def test_off_dialects(text):
    mesh = read_off(text.encode())
    assert mesh.vertices.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert mesh.faces.tolist() == [[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]
    assert area_of(mesh) == pytest.approx(1.5 + np.sqrt(3) / 2)
    assert ("header glued to the counts" in mesh.repairs) == text.startswith("OFF4")


def test_off_polygons_become_fans():
    lines = ["OFF", "8 7 0", *(" ".join(map(str, row)) for row in CUBE.tolist())]
    lines += ["4 " + " ".join(map(str, quad)) for quad in CUBE_QUADS.tolist()] + ["2 0 1"]
    mesh = read_off("\n".join(lines).encode())
    surface = surface_of(mesh)
    assert surface.areas.sum() == 6 and len(surface.areas) == 12 and surface.watertight
    assert surface.repairs == (
        "6 polygons cut into triangles",
        "1 faces of fewer than 3 corners dropped",
    )


def test_fan_by_hand():
    corners, counts = np.arange(12), np.array([3, 5, 4])
    assert fan(corners, counts)[0].tolist() == [
        [0, 1, 2], [3, 4, 5], [3, 5, 6], [3, 6, 7], [8, 9, 10], [8, 10, 11],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "empty_file"),
        ("  \n\n", "empty_file"),
        ("ply\nformat ascii 1.0\n", "bad_header"),
        ("OFF BINARY\n", "bad_header"),
        ("4OFF\n1 1 0\n", "unsupported_off"),
        ("OFF\nfour 4 6\n", "bad_header"),
        ("OFF\n-4 4 6\n", "bad_header"),
        ("OFF\n4 0 0\n0 0 0\n0 0 0\n0 0 0\n0 0 0\n", "no_faces"),
        ("OFF\n99999999999 4 6\n0 0 0\n", "truncated"),
        (TETRAHEDRON[: TETRAHEDRON.index("0 0 1")], "truncated"),
        (TETRAHEDRON[: TETRAHEDRON.index("3 1 2 3")], "truncated"),
        (TETRAHEDRON + "3 0 1 2\n", "surplus_lines"),
        (TETRAHEDRON.replace("0 0 1\n", "0 zero 1\n"), "bad_number"),
        (TETRAHEDRON.replace("0 0 1\n", "0 1\n"), "bad_vertex"),
        (TETRAHEDRON.replace("3 0 2 1", "4 0 2 1"), "bad_face"),
        (TETRAHEDRON.replace("3 0 2 1", "3 0 2.5 1"), "bad_face"),
        (TETRAHEDRON.replace("3 0 2 1", "3 0 nan 1"), "bad_face"),
    ],
)
def test_bad_off(text, rule):
    assert rule_of(read_off, text.encode()) == rule


def test_binary_bytes_are_no_text():
    assert rule_of(read_off, b"OFF\n\0\0\x07\x80") == "not_text"
    assert rule_of(read_off, b"\xff\xfe\x80 noise") == "bad_header"


# ---------------------------------------------------------------- surfaces


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("3 0 2 1", "3 0 2 4", "index_out_of_range"),
        ("3 0 2 1", "3 0 2 -1", "index_out_of_range"),
        ("0 0 1\n", "0 0 nan\n", "non_finite_vertex"),
        ("0 0 1\n", "0 0 -inf\n", "non_finite_vertex"),
        ("0 0 1\n", "0 0 1e200\n", "huge_coordinates"),
    ],
)
def test_bad_surfaces(old, new, rule):
    text = TETRAHEDRON.replace(old, new).encode()
    assert rule_of(lambda data: surface_of(read_off(data)), text) == rule


def test_a_nan_vertex_without_a_face_is_ignored():
    text = TETRAHEDRON.replace("4 4 6", "5 4 6").replace("3 0 2 1", "nan 0 0\n3 0 2 1")
    surface = surface_of(read_off(text.encode()))
    assert surface.repairs == ("1 nan or infinite vertices without a face ignored",)
    assert len(surface.used) == 4 and surface.watertight


def test_faces_without_area_are_dropped_and_counted():
    mesh = read_off(TETRAHEDRON.replace("4 4 6", "4 6 6").encode() + b"3 0 1 1\n3 2 2 2\n")
    surface = surface_of(mesh)
    assert surface.repairs == ("2 faces without area dropped",) and len(surface.areas) == 4
    assert surface.watertight
    flat = Mesh(np.zeros((3, 3)), np.array([[0, 1, 2]]))
    assert rule_of(surface_of, flat) == "no_area"
    assert rule_of(surface_of, Mesh(CUBE, np.empty((0, 3), np.int64))) == "no_faces"


def test_watertight():
    triangles = fan(CUBE_QUADS.reshape(-1), np.full(6, 4))[0]
    assert is_watertight(CUBE, triangles)
    assert not is_watertight(CUBE, triangles[:-1])
    assert not is_watertight(CUBE, np.concatenate([triangles, triangles[:1]]))
    soup = CUBE[triangles].reshape(-1, 3)
    assert is_watertight(soup, np.arange(len(soup)).reshape(-1, 3))


# ---------------------------------------------------------------- OBJ


def test_obj_dialects():
    text = (
        "mtllib x.mtl\nv 0 0 0\nv 1 0 0 # corner\nv  0 1 0\nvn 0 0 1\nvt 0 0\n"
        "g part\nusemtl m\nf 1//1 2//1 3//1\nv 0 0 1\nf -4/1/1 -3/1/1 \\\n -1/1/1\n"
        "l 1 2\nf 1 2 3 4\n"
    )
    mesh = read_obj(text.encode())
    assert mesh.vertices.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert mesh.faces.tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 2, 3]]
    assert mesh.repairs == ("1 polygons cut into triangles",)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "empty_file"),
        ("<html>", "no_vertices"),
        ("v 0 0 0\nv 1 0 0\n", "no_faces"),
        ("v 0 0 0\nv 1 0\nv 0 0 1\nf 1 2 3\n", "bad_vertex"),
        ("v 0 0 0\nv 1 x 0\nf 1 1 1\n", "bad_number"),
        ("v 0 0 0\nf 0 1 1\n", "index_out_of_range"),
        ("v 0 0 0\nf a b c\n", "bad_number"),
        ("v 0 0 0\nf 1.5 1 1\n", "bad_face"),
        ("v 0 0 0\nf 1 2 3\n", "index_out_of_range"),
        ("v 0 0 0\nf -1 -1 -2\n", "index_out_of_range"),
    ],
)
def test_bad_obj(text, rule):
    assert rule_of(lambda data: surface_of(read_obj(data)), text.encode()) == rule


# ---------------------------------------------------------------- PLY, STL, GLB


def glb(vertices: np.ndarray, faces: np.ndarray, moves: tuple[int, ...] = (0,)) -> bytes:
    """A binary glTF scene with the mesh once for each move along x."""
    points, corners = vertices.astype("<f4").tobytes(), faces.astype("<u4").tobytes()
    scene = {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": list(range(len(moves)))}],
        "nodes": [{"mesh": 0, "translation": [move, 0, 0]} for move in moves],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1, "mode": 4}]}],
        "buffers": [{"byteLength": len(points) + len(corners)}],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": len(points)},
            {"buffer": 0, "byteOffset": len(points), "byteLength": len(corners)},
        ],
        "accessors": [
            {
                "bufferView": 0, "componentType": 5126, "count": len(vertices), "type": "VEC3",
                "min": vertices.min(axis=0).tolist(), "max": vertices.max(axis=0).tolist(),
            },
            {"bufferView": 1, "componentType": 5125, "count": faces.size, "type": "SCALAR"},
        ],
    }  # fmt: skip
    text = json.dumps(scene).encode()
    text += b" " * (-len(text) % 4)
    body = struct.pack("<II", len(text), 0x4E4F534A) + text
    body += struct.pack("<II", len(points) + len(corners), 0x004E4942) + points + corners
    return struct.pack("<III", 0x46546C67, 2, 12 + len(body)) + body


@pytest.fixture
def with_open3d() -> None:
    """For tests of files that Open3D reads."""
    need_libraries(OPEN3D)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    need_libraries(OPEN3D)
    import open3d

    folder = tmp_path_factory.mktemp("open3d")
    triangles = fan(CUBE_QUADS.reshape(-1), np.full(6, 4))[0]
    mesh = open3d.geometry.TriangleMesh(
        open3d.utility.Vector3dVector(CUBE), open3d.utility.Vector3iVector(triangles)
    )
    mesh.compute_vertex_normals()
    (folder / "cube.glb").write_bytes(glb(CUBE, triangles))
    for reader in ("ply", "stl"):
        assert open3d.io.write_triangle_mesh(str(folder / f"cube.{reader}"), mesh)
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(CUBE))
    assert open3d.io.write_point_cloud(str(folder / "points.ply"), cloud)
    return folder


@pytest.mark.parametrize("reader", OPEN3D_READERS)
def test_a_cube_in_every_format(written, reader, tmp_path):
    path = written / f"cube.{reader}"
    loud = tmp_path / f"CUBE.{reader.upper()}"
    loud.write_bytes(path.read_bytes())
    for name in (path, loud):
        mesh, _ = read_shape(name, reader, "", None, tmp_path)
        assert isinstance(mesh, Mesh)
        surface = surface_of(mesh)
        assert surface.areas.sum() == pytest.approx(6) and surface.watertight
        assert (surface.used.min(axis=0).tolist(), surface.used.max(axis=0).tolist()) == (
            [0, 0, 0],
            [1, 1, 1],
        )


@pytest.mark.usefixtures("with_open3d")
def test_the_parts_of_a_scene_stand_where_they_belong(tmp_path):
    triangles = fan(CUBE_QUADS.reshape(-1), np.full(6, 4))[0]
    (tmp_path / "two.glb").write_bytes(glb(CUBE, triangles, moves=(0, 5)))
    mesh, _ = read_shape(tmp_path / "two.glb", "glb", "", None, tmp_path)
    surface = surface_of(mesh)
    assert surface.areas.sum() == pytest.approx(12) and surface.watertight
    assert surface.used.max(axis=0).tolist() == [6, 1, 1]


def test_a_ply_without_faces_is_a_scan(written, tmp_path):
    scan, _ = read_shape(written / "points.ply", "ply", "", None, tmp_path)
    assert isinstance(scan, Scan) and sorted(scan.points.tolist()) == sorted(CUBE.tolist())


@pytest.mark.usefixtures("with_open3d")
@pytest.mark.parametrize("reader", ["stl", "glb"])
def test_noise_is_no_mesh(reader, tmp_path):
    path = tmp_path / f"noise.{reader}"
    path.write_bytes(np.random.default_rng(0).bytes(500))
    with pytest.raises(RecordError) as caught:
        read_shape(path, reader, "", None, tmp_path)
    assert caught.value.rule in ("truncated", "bad_header")


def ball(folder: Path, reader: str, text: bool = False) -> bytes:
    """A mesh of some thousand triangles as this format has it."""
    import open3d

    mesh = open3d.geometry.TriangleMesh.create_sphere(1.0, 24)
    path = folder / f"ball.{reader}"
    if reader == "glb":
        return glb(np.asarray(mesh.vertices), np.asarray(mesh.triangles))
    mesh.compute_vertex_normals()
    assert open3d.io.write_triangle_mesh(str(path), mesh, write_ascii=text)
    return path.read_bytes()


@pytest.mark.usefixtures("with_open3d")
@pytest.mark.parametrize("how", ["cut", "zeros"])
@pytest.mark.parametrize(
    ("reader", "text"), [("ply", False), ("ply", True), ("stl", False), ("glb", False)]
)
def test_a_file_without_its_end_is_refused(tmp_path, reader, text, how):
    whole = ball(tmp_path, reader, text)
    path = tmp_path / f"whole.{reader}"
    path.write_bytes(whole)
    mesh, _ = read_shape(path, reader, "", None, tmp_path)
    assert surface_of(mesh).watertight
    for share in (0.99, 0.9, 0.6, 0.4):
        kept = whole[: int(len(whole) * share)]
        path.write_bytes(kept if how == "cut" else kept.ljust(len(whole), b"\0"))
        with pytest.raises(RecordError) as caught:
            read_shape(path, reader, "", None, tmp_path)
        assert caught.value.rule == "truncated", share


@pytest.mark.usefixtures("with_open3d")
@pytest.mark.parametrize("zeros", [13, 20, 27, 40, 63])
def test_a_few_zeros_at_the_end_of_a_mesh_are_refused(tmp_path, zeros):
    """A face of zeros is none: each has 13 bytes, a count and three corners."""
    whole = ball(tmp_path, "ply", text=False)
    path = tmp_path / "zeros.ply"
    path.write_bytes(whole[:-zeros] + bytes(zeros))
    with pytest.raises(RecordError, match=r"last face is zeros|of element face") as caught:
        read_shape(path, "ply", "", None, tmp_path)
    assert caught.value.rule == "truncated"


@pytest.mark.usefixtures("with_open3d")
@pytest.mark.parametrize("how", ["cut", "zeros"])
def test_a_scan_without_its_end_is_refused(tmp_path, how):
    points = np.random.default_rng(0).random((500, 3)).astype("<f4")
    head = "ply\nformat binary_little_endian 1.0\nelement vertex 500\n"
    head += "".join(f"property float {axis}\n" for axis in "xyz") + "end_header\n"
    whole = head.encode() + points.tobytes()
    path = tmp_path / "scan.ply"
    path.write_bytes(whole)
    assert len(read_shape(path, "ply", "", None, tmp_path)[0].points) == 500
    kept = whole[: len(whole) * 9 // 10]
    path.write_bytes(kept if how == "cut" else kept.ljust(len(whole), b"\0"))
    with pytest.raises(RecordError) as caught:
        read_shape(path, "ply", "", None, tmp_path)
    assert caught.value.rule == "truncated"


def test_polygons_of_a_ply_are_all_counted():
    head = "ply\nformat binary_big_endian 1.0\nelement vertex 8\n"
    head += "".join(f"property float {axis}\n" for axis in "xyz")
    head += "element face 6\nproperty list uchar int vertex_indices\nend_header\n"
    faces = [quad[:3] for quad in CUBE_QUADS[:3]] + list(CUBE_QUADS[3:])
    body = CUBE.astype(">f4").tobytes()
    body += b"".join(bytes([len(face)]) + np.array(face, ">i4").tobytes() for face in faces)
    whole = head.encode() + body
    assert check_whole(whole, "ply").vertices == 8
    for cut in (1, 8, 13, 40):
        with pytest.raises(RecordError, match="6 of element face are announced"):
            check_whole(whole[:-cut], "ply")


# ---------------------------------------------------------------- scans


@pytest.mark.parametrize("how", ["external link", "soft link", "external storage", "virtual"])
@pytest.mark.parametrize("name", ["data", "mask", "label"])
def test_an_h5_file_that_names_other_files_is_refused(tmp_path, how, name):
    import h5py

    arrays = {
        "data": np.random.default_rng(0).random((2, 8, 3)).astype("f4"),
        "mask": np.zeros((2, 8), "i4"),
        "label": np.arange(2),
    }
    with h5py.File(tmp_path / "other.h5", "w") as other:
        for key, array in arrays.items():
            other[key] = array
    (tmp_path / "secret").write_bytes(arrays[name].tobytes())
    path = tmp_path / "shapes.h5"
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            if key != name:
                file[key] = array
            elif how == "external link":
                file[key] = h5py.ExternalLink(str(tmp_path / "other.h5"), key)
            elif how == "soft link":
                file["itself"] = h5py.ExternalLink(str(tmp_path / "other.h5"), key)
                file[key] = h5py.SoftLink("/itself")
            elif how == "external storage":
                place = [(str(tmp_path / "secret"), 0, array.nbytes)]
                file.create_dataset(key, array.shape, array.dtype, external=place)
            else:
                layout = h5py.VirtualLayout(array.shape, array.dtype)
                layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), key, array.shape)
                file.create_virtual_dataset(key, layout)
    with pytest.raises(RecordError) as caught:
        if name == "mask":
            read_h5_row(path, "data", 0)
        else:
            probe_h5({"path": str(path)}, tmp_path)
    assert caught.value.rule == "foreign_bytes"


def test_bin():
    rows = np.arange(33, dtype="<f4").reshape(3, 11)
    data = np.float32(3).tobytes() + rows.tobytes()
    assert read_bin(data).points.tolist() == rows[:, :3].tolist()
    assert {rule_of(read_bin, bad) for bad in (data[:-4], data[:-1], data + b"\0" * 4, b"")} == {
        "truncated"
    }


def test_point_text():
    assert read_points_text(b"1,2,3,0,0,1\n4,5,6,0,0,1\n").points.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read_points_text(b"1 2 3\n4 5 6").points.tolist() == [[1, 2, 3], [4, 5, 6]]
    text = b"object,z,x,y\nbush,1,2,3\n"
    assert read_points_text(text).points.tolist() == [[2, 3, 1]]
    text = b"origin_x,origin_y,origin_z,relative_x\n1,2,3,9\n"
    assert read_points_text(text).points.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"", "empty_file"),
        (b"a,b,c\n1,2,3\n", "bad_header"),
        (b"x,y,z\n", "no_points"),
        (b"1,2,3\n4,5\n", "bad_number"),
        (b"1,2,3\n4,five,6\n", "bad_number"),
        (b"1,2\n", "bad_header"),
    ],
)
def test_bad_point_text(text, rule):
    assert rule_of(read_points_text, text) == rule


def write_h5(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    return path


def test_h5_rows_and_their_mask(tmp_path):
    data = np.random.default_rng(0).random((2, 40, 3)).astype(np.float32)
    mask = np.where(np.arange(40) < 10, -1, 4)[None].repeat(2, 0)
    path = write_h5(tmp_path / "a.h5", data=data, mask=mask, label=np.array([4, 4]))
    assert probe_h5({"path": str(path)}, tmp_path)["rows"] == 2
    item = ITEM | {"path": str(path), "reader": "h5", "part": "data", "row": 1}
    keep, drop = (sample_file(item | {"background": how}, tmp_path) for how in ("keep", "drop"))
    assert (keep["vertices"], drop["vertices"]) == (40, 30)
    assert keep["background"] == drop["background"] == 0.25
    assert (keep["count"], drop["count"]) == (32, 30)
    points = drop["points"].reshape(32, 3)
    assert (points[30:] == points[:2]).all()
    raw = points[:30] * drop["scale"] + drop["center"]
    assert sorted(raw[:, 0]) == pytest.approx(sorted(data[1, 10:, 0]), abs=1e-6)


def test_bad_scans(tmp_path):
    data = np.ones((3, 8, 3), np.float32)
    data[0, 2, 1] = np.nan
    data[2] = np.arange(24).reshape(8, 3)
    path = write_h5(tmp_path / "bad.h5", data=data, mask=np.full((3, 8), -1))
    item = ITEM | {"path": str(path), "reader": "h5", "part": "data"}
    rules = {}
    for row, background in ((0, "keep"), (1, "keep"), (2, "drop"), (9, "keep")):
        with pytest.raises(RecordError) as caught:
            sample_file(item | {"row": row, "background": background}, tmp_path)
        rules[row] = caught.value.rule
    assert rules == {0: "non_finite_point", 1: "no_extent", 2: "no_points", 9: "bad_h5"}
    text = tmp_path / "a.csv"
    text.write_text("1,2,3\n4,5,6\n")
    with pytest.raises(RecordError) as caught:
        item = ITEM | {"path": str(text), "reader": "points", "background": "drop"}
        sample_file(item, tmp_path)
    assert caught.value.rule == "no_mask"
    (tmp_path / "noise.h5").write_bytes(b"no hdf5")
    assert rule_of(lambda path: probe_h5({"path": str(path)}, path), tmp_path / "noise.h5") == (
        "bad_h5"
    )


# ---------------------------------------------------------------- grids


def test_surface_of_grids():
    one = np.zeros((4, 4, 4), np.int32)
    one[1, 2, 3] = 1
    surface = surface_of(grid_surface(one))
    assert surface.areas.sum() == 6 and surface.watertight and len(surface.used) == 8
    assert surface.used.min(axis=0).tolist() == [1, 2, 3]
    block = np.zeros((5, 6, 7))
    block[1:3, 1:4, 1:5] = 1
    surface = surface_of(grid_surface(block))
    assert surface.areas.sum() == 2 * (2 * 3 + 3 * 4 + 2 * 4) and surface.watertight
    middle = surface.used.mean(axis=0)
    normals = np.cross(
        surface.corners[:, 1] - surface.corners[:, 0], surface.corners[:, 2] - surface.corners[:, 0]
    )
    outward = surface.corners.mean(axis=1) - middle
    assert ((normals * outward).sum(axis=1) > 0).all()
    assert rule_of(grid_surface, np.zeros((4, 4, 4))) == "empty_grid"


def test_grid_rows_in_any_order(tmp_path):
    grids = np.random.default_rng(0).integers(0, 2, (6, 3, 3, 3))
    path = tmp_path / "g.npz"
    np.savez_compressed(path, X_train=grids, y_train=np.arange(6))
    assert probe_npz({"path": str(path)}, tmp_path)["X_train"].tolist() == list(range(6))
    for row in (2, 3, 5, 0, 0, 4):
        mesh, _ = read_grid_row(path, "X_train", row)
        assert np.array_equal(mesh.vertices, grid_surface(grids[row]).vertices)


def test_bad_npz(tmp_path):
    def probe(path: Path) -> None:
        probe_npz({"path": str(path)}, tmp_path)

    path = tmp_path / "g.npz"
    path.write_bytes(b"no zip")
    assert rule_of(probe, path) == "bad_npz"
    np.savez(path, other=np.zeros(3))
    assert rule_of(probe, path) == "bad_npz"
    np.savez(path, X_train=np.zeros((3, 2, 2, 2)), y_train=np.zeros(2))
    assert rule_of(probe, path) == "bad_npz"


# ---------------------------------------------------------------- real files


@pytest.mark.usefixtures("with_open3d")
def test_real_off_files_against_a_plain_reader_and_open3d(tmp_path):
    import open3d

    folder = shared_path("shapes/samples")
    paths = sorted(folder.glob("*.off"))
    assert len(paths) == 6
    glued = 0
    for path in paths:
        data = path.read_bytes()
        mesh = read_off(data)
        points, triangles = plain_off(data)
        assert np.array_equal(mesh.vertices, points)
        assert mesh.faces.tolist() == [list(face) for face in triangles]
        glued += "header glued to the counts" in mesh.repairs
        other = open3d.geometry.TriangleMesh(
            open3d.utility.Vector3dVector(points), open3d.utility.Vector3iVector(triangles)
        )
        assert area_of(mesh) == pytest.approx(other.get_surface_area(), rel=1e-9)
    assert glued == 3


@pytest.mark.usefixtures("with_open3d")
def test_a_real_shapenet_mesh_against_open3d():
    import open3d

    path = shared_path("shapes/samples/shapenet_model_normalized.obj")
    mesh = read_obj(path.read_bytes())
    assert len(mesh.vertices) == 138
    other = open3d.io.read_triangle_mesh(str(path))
    assert len(mesh.faces) == len(other.triangles)
    assert area_of(mesh) == pytest.approx(other.get_surface_area(), rel=1e-5)


def test_real_obj_files():
    faces_without_area = with_normals = 0
    with zipfile.ZipFile(shared_path("shapes/shapedb_mini.zip")) as archive:
        names = [name for name in archive.namelist() if name.endswith(".obj")]
        assert len(names) == 387
        for name in names:
            data = archive.read(name)
            mesh = read_obj(data)
            assert len(mesh.faces) == data.count(b"\nf ") + data.startswith(b"f ")
            surface = surface_of(mesh)
            with_normals += b"//" in data
            faces_without_area += any("without area" in repair for repair in surface.repairs)
            a, b, c = mesh.vertices[mesh.faces].transpose(1, 0, 2)
            u, v = b - a, c - a
            gram = (u * u).sum(1) * (v * v).sum(1) - (u * v).sum(1) ** 2
            assert surface.areas.sum() == pytest.approx(np.sqrt(gram.clip(0)).sum() / 2, rel=1e-6)
    assert (with_normals, faces_without_area) == (165, 43)
