package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/storage"
)

func (a *app) imagesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List the images in CRI-O's root and the handlers' roots",
		Long: "List the images in CRI-O's root and the handlers' roots. HANDLER names the handlers whose root has the image;\n" +
			"'default' is CRI-O's own. LEASED says that the image is held for a volume and cannot be removed.\n" +
			"Works without the daemon, too.",
		Args: cobra.NoArgs,
	}
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			list, err := store.Images(cmd.Context())
			if err != nil {
				return err
			}
			slices.SortFunc(list.Images, func(x, y storage.ImageAt) int {
				return cmp.Or(slices.Compare(x.Names, y.Names), cmp.Compare(x.ID, y.ID))
			})
			if *output == "json" {
				return writeJSON(a.out, list)
			}
			for _, fault := range list.Faults {
				fmt.Fprintln(a.err, "ocihold:", fault)
			}
			rows := [][]string{{"IMAGE", "IMAGE ID", "HANDLER", "SIZE", "LEASED"}}
			for _, image := range list.Images {
				rows = append(rows, []string{
					allNames(image.Names), short(image.ID), strings.Join(image.Handlers, ", "),
					units.HumanSize(float64(image.Size)), fmt.Sprint(image.Leased),
				})
			}
			return writeTable(a.out, rows)
		})
	}
	return cmd
}

func allNames(names []string) string { return cmp.Or(strings.Join(names, ", "), "<none>") }
