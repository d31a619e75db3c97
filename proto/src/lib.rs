//! The wire: .proto files, generated code, and the one conversion between wire and core.
