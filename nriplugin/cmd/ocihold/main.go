// Command ocihold stores images and gives containers image volumes beside
// CRI-O.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.podman.io/storage/pkg/reexec"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/cli"
)

func main() {
	if reexec.Init() {
		return // this process unpacks a layer for another
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := cli.Execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "ocihold:", err)
		os.Exit(1)
	}
}
