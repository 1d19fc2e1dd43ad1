package cli

import (
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
)

func (a *app) volumesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volumes",
		Short: "List the image volumes that containers have",
		Args:  cobra.NoArgs,
	}
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, err := a.load(cmd)
		if err != nil {
			return err
		}
		volumes, err := control.NewClient(controlSocket(config)).Volumes(cmd.Context())
		if err != nil {
			return err
		}
		if *output == "json" {
			return writeJSON(a.out, volumes)
		}
		rows := [][]string{{"NAMESPACE", "POD", "CONTAINER", "PATH", "IMAGE", "IMAGE ID", "DIGEST", "WRITABLE"}}
		for _, v := range volumes {
			images := v.Images
			if len(images) == 0 {
				images = []imagevolume.VolumeImage{v.VolumeImage}
			}
			for _, image := range images {
				rows = append(rows, []string{
					v.Namespace, v.Pod, v.Container, v.MountPath, image.Image, short(image.ImageID), image.Digest, writable(v),
				})
			}
		}
		return writeTable(a.out, rows)
	}
	return cmd
}

// writable says how much can be written, and how long it stays.
func writable(v imagevolume.Status) string {
	if v.Scratch == "" {
		return "-"
	}
	return units.BytesSize(float64(v.ScratchSize)) + ", " + string(v.Scratch)
}
