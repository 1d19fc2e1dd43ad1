// Command ocihold-guard is a createRuntime OCI hook that refuses a container
// whose image volumes were not injected.
package main

import (
	"fmt"
	"os"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold-guard/internal/guard"
)

func main() {
	if err := guard.Run(os.Args[1:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "ocihold-guard:", err)
		os.Exit(1)
	}
}
