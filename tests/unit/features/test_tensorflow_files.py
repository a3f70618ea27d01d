"""Lines of TensorFlow that only the rank's log has."""

from allranks.features.tensorflow_files import held_back

START = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795381448.299248   21858 port.cc:153] oneDNN custom operations are on. You may see
I0000 00:00:1795381448.301877   21858 cudart_stub.cc:31] Could not find cuda drivers on your machine
E0000 00:00:1733143611.391211   12345 cuda_dnn.cc:8310] Unable to register cuDNN factory
I0000 00:00:1795381448.301877   21858 cpu_feature_guard.cc:210] This TensorFlow binary is optimized
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the
"""


def test_known_lines_are_held_back_and_all_others_stay():
    assert held_back(f"before\n{START}after\n{START}") == "before\nafter\n"
    told = "E0000 00:00:1795381448.301877   21858 gpu.cc:31] out of memory\n"
    spoken = "oneDNN custom operations are on\nport.cc:153] oneDNN custom operations are on\n"
    for text in (told, spoken, told + spoken, "To enable the following instructions: read on"):
        assert held_back(text) == text
