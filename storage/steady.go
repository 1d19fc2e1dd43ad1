package storage

import "regexp"

// passing matches what differs from one failure to the next of the same kind: the names of temporary files
// (storage/storage_dest.go), the times of a connection that broke off (docker/body_reader.go), the ports of connections
// (net.OpError).
var passing = regexp.MustCompile(`storing blob to file "[^"]*": |\(heuristic tuning data: [^)]*\): |\b(?:read|write) (?:tcp|udp)\S* \S+->\S+: `)

// steady is an error whose text is the same whenever the same fails again, so that those who fold or compare texts see
// one failure.
type steady struct{ error }

func (e steady) Error() string { return passing.ReplaceAllString(e.error.Error(), "") }

func (e steady) Unwrap() error { return e.error }
