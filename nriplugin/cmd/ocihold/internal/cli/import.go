package cli

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/storage"
)

func (a *app) importCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import PATH",
		Short: "Import an image from a file into a handler's root",
		Long: "Import an image from a docker-archive or oci-archive, compressed or not, or the directory of an OCI layout, into the\n" +
			"root of a runtime handler and for its platform; without --handler, into CRI-O's own. What it is is seen from the file,\n" +
			"or said by docker-archive:, oci-archive: or oci: before the path. The image has the name that is in the file, or that of\n" +
			"--name, which also chooses among several. The signature policy for pulls by that name holds. Prints the image ID; progress\n" +
			"goes to standard error. Works without the daemon, too.",
		Args: cobra.ExactArgs(1),
	}
	output := outputFlag(cmd)
	handler := handlerFlag(cmd, "import for this runtime handler")
	name := cmd.Flags().String("name", "", "the image's name")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		from, err := absolute(args[0])
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			return a.follow(args[0], *output, func(show func(storage.Progress)) (storage.Image, error) {
				return store.Import(cmd.Context(), *handler, from, *name, show)
			})
		})
	}
	return cmd
}

// absolute makes the path absolute, which the daemon has another directory for,
// and leaves what says its kind before it.
func absolute(from string) (string, error) {
	kind, path := "", from
	for _, k := range []string{"docker-archive:", "oci-archive:", "oci:"} {
		if rest, ok := strings.CutPrefix(from, k); ok {
			kind, path = k, rest
		}
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", from, err)
	}
	return kind + path, nil
}
