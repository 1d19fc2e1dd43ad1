package storage

import (
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSteady(t *testing.T) {
	for text, want := range map[string]string{
		`writing blob: storing blob to file "/d/container_images_storage12/2": happened during read: %w`:                                       "writing blob: happened during read: EOF",
		"parsing image configuration: (heuristic tuning data: total 200 @1069.832 ms, last retry 100 @0.010 ms, last progress @ 0.006 ms): %w": "parsing image configuration: EOF",
		`Get "http://r/v2/": read tcp 127.0.0.1:1234->[::1]:5000: read: %w`:                                                                    `Get "http://r/v2/": read: EOF`,
		"lookup r on 10.0.0.1:53: read udp 10.0.0.2:1234->10.0.0.1:53: %w":                                                                     "lookup r on 10.0.0.1:53: EOF",
		"dial tcp 127.0.0.1:5000: %w": "dial tcp 127.0.0.1:5000: EOF",
	} {
		err := steady{fmt.Errorf(text, io.EOF)}
		require.EqualError(t, err, want)
		require.ErrorIs(t, err, io.EOF)
	}
}
